"""Number formats: codecs, block scaling, packing, layouts."""
