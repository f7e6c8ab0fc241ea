"""What we do to tensors: one folder per op, each with its signature and checks in `__init__.py` and its
definition in `reference.py`. Ops know formats and backends; they know no models, records or sessions, and
never import each other.
"""
