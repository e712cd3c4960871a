"""A storm: real clients check every byte while the parts of an instance are killed."""
