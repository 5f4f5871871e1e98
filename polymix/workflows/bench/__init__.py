"""`polymix bench`: what the mixers cost on this machine."""
