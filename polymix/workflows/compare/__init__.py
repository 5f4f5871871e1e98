"""`polymix compare`: which mixer, how accurate, how fast, and from which length on, on your data and machine.

settings what is asked for
run      training and measurement
verdict  what the numbers say, in words
tables   the results as text
report   the page and its pictures
"""
