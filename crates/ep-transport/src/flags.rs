//! Binary flags in shared host memory, and the parking of those who wait for them.
