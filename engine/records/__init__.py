"""Stored records: uploaded files, jobs, batches, and their events."""
