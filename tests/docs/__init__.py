"""The pages say what the code says."""
