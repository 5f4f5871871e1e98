"""`polymix compare`: which mixer, how accurate, how fast, and from which length on, on your images and machine.

run      settings, training and measurement
verdict  what the numbers say, in words
tables   the results as text
report   the page and its pictures
"""
