"""Processes that Ray starts. Nothing else imports Ray."""
