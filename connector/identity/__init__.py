"""What must be equal for a cache to be of use elsewhere: digests of models, and of the contents of blocks."""
