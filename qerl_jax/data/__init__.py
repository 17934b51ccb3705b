"""Problems, their answers, and the tokenizer: what a policy is asked, and how texts become ids.

May import `config` and `files`.
"""
