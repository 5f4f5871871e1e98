"""`polymix compare`: which mixer, how accurate, how fast, from how many tokens on, on the user's images and machine."""
