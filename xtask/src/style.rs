//! What is printed: 80 columns, colours on a terminal only.

use std::env;
use std::io::{IsTerminal, stdout};
use std::time::Duration;

/// The widest line of our own.
pub const COLUMNS: usize = 80;

/// Whether standard output takes colours.
pub fn colours() -> bool {
    stdout().is_terminal() && env::var_os("NO_COLOR").is_none()
}

/// `text` in an ANSI style where standard output takes colours.
pub fn paint(text: &str, code: &str) -> String {
    if colours() { format!("\x1b[{code}m{text}\x1b[0m") } else { text.to_owned() }
}

pub const BOLD: &str = "1";
pub const GREEN: &str = "32";
pub const RED: &str = "1;31";
pub const YELLOW: &str = "33";

/// `12.3 s` or `4 min 05 s`.
pub fn seconds(time: Duration) -> String {
    let tenths = time.as_millis().div_ceil(100);
    if tenths < 600 {
        format!("{}.{} s", tenths / 10, tenths % 10)
    } else {
        let whole = time.as_secs();
        format!("{} min {:02} s", whole / 60, whole % 60)
    }
}

/// `text` without ANSI escape sequences: `ESC [ … letter`, and `ESC ( letter` of some terminals'
/// resets.
pub fn strip_ansi(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut chars = text.chars().peekable();
    while let Some(c) = chars.next() {
        if c != '\x1b' {
            out.push(c);
        } else if chars.next_if_eq(&'(').is_some() {
            chars.next();
        } else if chars.next_if_eq(&'[').is_some() {
            for c in chars.by_ref() {
                if c.is_ascii_alphabetic() {
                    break;
                }
            }
        }
    }
    out
}

/// `text` broken at spaces into lines of at most `COLUMNS`, each but the first behind `indent`
/// spaces; `used` columns of the first line are taken.
pub fn wrap(text: &str, used: usize, indent: usize) -> String {
    let mut out = String::new();
    let mut column = used;
    for (i, word) in text.split_whitespace().enumerate() {
        let width = word.chars().count();
        if i > 0 && column + 1 + width > COLUMNS {
            out.push('\n');
            out.push_str(&" ".repeat(indent));
            column = indent;
        } else if i > 0 {
            out.push(' ');
            column += 1;
        }
        out.push_str(word);
        column += width;
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_read_well() {
        assert_eq!(seconds(Duration::from_millis(0)), "0.0 s");
        assert_eq!(seconds(Duration::from_millis(1250)), "1.3 s");
        assert_eq!(seconds(Duration::from_secs(245)), "4 min 05 s");
    }

    #[test]
    fn escapes_are_stripped() {
        assert_eq!(strip_ansi("\x1b[1;32mok\x1b[0m. 3"), "ok. 3");
        assert_eq!(strip_ansi("\x1b[31m-a\x1b(B\x1b[m"), "-a");
        assert_eq!(strip_ansi("plain"), "plain");
    }

    #[test]
    fn wrapped_lines_fit() {
        let text = "word ".repeat(60);
        let wrapped = wrap(&text, 30, 10);
        assert!(wrapped.lines().count() > 3);
        assert!(wrapped.lines().next().unwrap().len() <= COLUMNS - 30);
        assert!(wrapped.lines().all(|line| line.len() <= COLUMNS));
        assert_eq!(wrapped.split_whitespace().count(), 60);
    }
}
