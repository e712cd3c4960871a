"""What tests of several rooms share: instances, clients, and looks inside."""
