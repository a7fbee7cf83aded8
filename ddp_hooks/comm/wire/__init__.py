"""Wire formats: how numbers travel. They know tensors, no ranks."""
