//! Tests of the functions as callers meet them.
