"""`polymix bench`: what the mixers cost on this machine.

run      settings, and the measurement of every group of rows
tables   the results as text
report   the page and its pictures
changes  two results compared
"""
