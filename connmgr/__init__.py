"""The connmgr process."""
