"""How the commands show things to people; `penstock inspect`, of the server's package, shows rows with it, too.

batch_view   what is shown of a batch, as data
table        the same as a table, and text cut to a few lines
terminal     colours, and how many columns text takes
status_line  what somebody who waits sees meanwhile
stdout       who reads, and may leave
"""
