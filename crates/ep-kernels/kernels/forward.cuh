// Compiled before rows.cu: its dispatch moves rows that other ranks sent here to be forwarded.
#define EP_FORWARD 1
