"""Op rules: which layouts an op allows, one line an op. `notation` is the language; each other file is a family."""
