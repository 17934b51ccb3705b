"""What a policy may call: tools and environments, their processes, calls as text, and conversations.

May import `rewards`, `data`, `distributed` and what those import.
"""
