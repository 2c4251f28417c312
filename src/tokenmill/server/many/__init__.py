"""Many models behind one address: what there is, what is loaded, and who goes when memory ends."""
