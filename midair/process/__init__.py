"""What every process of Midair is made of: its start, its role, its files, its messages."""
