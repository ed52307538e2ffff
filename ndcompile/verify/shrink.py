"""A program at small sizes, on a small mesh, with few blocks: the same text, other numbers in its table.

(Being built by the lead, with its test in tests/verify/test_shrink.py.)
"""
