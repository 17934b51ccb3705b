"""Tables of test cases, in which cases that differ in one value share a row."""


def spread(table):
    """Returns a case for each item of a row's last value, after the row's other values."""
    return [(*shared, item) for *shared, items in table for item in items]
