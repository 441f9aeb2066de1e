"""What the processes of one host share in memory: segment, rows, tables, metric cells.

Every cell has one writer; readers sum rows or read snapshots; nothing here ever waits for another process.
"""
