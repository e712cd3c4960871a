"""`midair fsck`: the rules of shared memory, checked and repaired."""
