"""Problems, their answers, chat templates and tool calls as text, and the tokenizer.

May import `config` and `system`.
"""
