"""What a request's steps were: written as they come, shown as a page, compared."""
