"""The demonstration: a small language model, trained on one device and on a mesh, and compared."""
