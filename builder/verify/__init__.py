"""`mtpbuild verify`: does this engine say what its model says, whatever it drafts?"""
