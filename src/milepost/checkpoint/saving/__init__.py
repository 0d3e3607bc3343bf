"""How a step's bytes come to the disk: taken in one copy, hashed and written by a crew, one step in flight."""
