"""Facts about chips, networks and flags, and the hardware of this machine."""
