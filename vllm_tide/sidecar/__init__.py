"""The trainer's process: drains engines, trains, deploys, reports."""
