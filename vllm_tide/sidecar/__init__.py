"""The trainer process: reads records, trains, deploys drafts and reports."""
