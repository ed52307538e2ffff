"""Random programs: small models, meshes and pins, each of which must compile and be equal, or be refused clearly."""
