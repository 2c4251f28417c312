"""Child processes that may die: how they behave towards their parent, and the one client of sandboxed helpers."""
