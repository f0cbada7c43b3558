"""Tables of many sites: files in, preprocessing learned from sums, rows out."""
