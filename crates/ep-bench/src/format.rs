//! Numbers for people.

/// Bytes in decimal units, three digits: `15.3 MB`.
pub fn bytes(n: f64) -> String {
    scaled(n, 1e3, &["B", "kB", "MB", "GB", "TB"])
}

/// Microseconds in the unit that suits them: `412 µs`, `12.3 ms`.
pub fn micros(us: f64) -> String {
    scaled(us, 1e3, &["µs", "ms", "s"])
}

fn scaled(mut n: f64, step: f64, units: &[&str]) -> String {
    let mut unit = 0;
    // 999.5 would print as 1000.
    while n >= 999.5 && unit + 1 < units.len() {
        n /= step;
        unit += 1;
    }
    let digits = match n {
        n if n >= 99.95 || (unit == 0 && n.fract() == 0.0) => 0,
        n if n >= 9.995 => 1,
        _ => 2,
    };
    format!("{n:.digits$} {}", units[unit])
}

/// Cuts `text` to `width` characters, the last of them an ellipsis if something was cut.
pub fn cut(text: &str, width: usize) -> String {
    if text.chars().count() <= width {
        return text.to_owned();
    }
    text.chars().take(width.saturating_sub(1)).chain(['…']).collect()
}

/// Breaks `text` between words into lines of at most `width` characters, the second and later
/// ones after `indent`.
pub fn wrap(text: &str, width: usize, indent: &str) -> String {
    let mut lines = vec![String::new()];
    let mut used = 0;
    for word in text.split_whitespace() {
        let length = word.chars().count();
        if used > 0 && used + 1 + length > width {
            lines.push(indent.to_owned());
            used = indent.chars().count();
        } else if used > 0 {
            lines.last_mut().expect("starts with one line").push(' ');
            used += 1;
        }
        lines.last_mut().expect("starts with one line").push_str(word);
        used += length;
    }
    lines.join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn three_digits() {
        for (n, text) in [
            (0.0, "0 B"),
            (12.0, "12 B"),
            (999.6, "1.00 kB"),
            (14_680_064.0, "14.7 MB"),
            (123_456_789.0, "123 MB"),
        ] {
            assert_eq!(bytes(n), text);
        }
        for (n, text) in
            [(0.5, "0.50 µs"), (411.9, "412 µs"), (12_345.0, "12.3 ms"), (6e7, "60.0 s")]
        {
            assert_eq!(micros(n), text);
        }
    }

    #[test]
    fn lines_stay_within_their_width() {
        assert_eq!(cut("rank-major", 6), "rank-…");
        assert_eq!(cut("µµµ", 3), "µµµ");
        let text = wrap("one two three four five", 9, "  ");
        assert_eq!(text, "one two\n  three\n  four\n  five");
    }
}
