"""Terminal output of the commands; `penstock inspect`, of the server's package, shows rows with it, too.

batch_view   the displayed contents of a batch, as data
table        the same as a table, with text cut to a few lines
terminal     colours, and the width of text in columns
status_line  progress line for a waiting user
stdout       output to pipes that may close, and to full disks
"""
