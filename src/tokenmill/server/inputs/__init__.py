"""How every name that a client may send is treated: used, refused by name, harmless, or reported as ignored."""
