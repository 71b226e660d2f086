"""Access to the data source of a mount. Each mount has one `Origin`."""
