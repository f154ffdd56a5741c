"""Where drafts were accepted, by what traces say."""
