"""What every room may use: errors, version, protocols, input files, masking of passwords."""
