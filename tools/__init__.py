"""Programs for people who use or tune moecomm; nothing imports them."""
