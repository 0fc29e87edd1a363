"""Number formats that several rooms share: how values are quantised and taken back, exact to the bit."""
