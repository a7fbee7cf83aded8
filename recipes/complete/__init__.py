"""Complete training programs, to read and to start from."""
