"""What a cache means: encodings, geometry, identity, cuts and the gate. Pure: no I/O, no devices, no NumPy."""
