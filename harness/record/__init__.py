"""What a run leaves behind: verdicts, origins, pages. Records and their JSON; judges nothing."""
