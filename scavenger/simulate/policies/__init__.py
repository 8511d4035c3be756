"""Contenders: each a small module over the router's own seam."""
