//! Enough of Rust's lexical structure to tell code from comments, strings and tests.

use std::path::{Path, PathBuf};

use super::File;

/// A Rust source with everything blanked (offsets and lines stay) that a check must not see.
pub struct Source {
    /// Comments and the insides of strings blanked.
    pub code: String,
    /// Tests and code for the model checker blanked too.
    pub shipped: String,
    /// Modules in files of their own that exist only in tests.
    test_modules: Vec<String>,
}

impl Source {
    pub fn new(text: &str) -> Self {
        let code = blank_text(text);
        let (shipped, test_modules) = blank_tests(&code);
        Self { code, shipped, test_modules }
    }
}

/// The line of `offset`, from 1.
pub fn line_of(text: &str, offset: usize) -> usize {
    text.as_bytes()[..offset].iter().filter(|b| **b == b'\n').count() + 1
}

/// Where `word` stands in `code`, not as a part of a longer name.
pub fn words<'a>(code: &'a str, word: &'a str) -> impl Iterator<Item = usize> + 'a {
    let name = |c: char| c.is_alphanumeric() || c == '_';
    code.match_indices(word).map(|(at, _)| at).filter(move |&at| {
        let before = code[..at].chars().next_back().is_some_and(name);
        let after = code[at + word.len()..].chars().next().is_some_and(name);
        !(before && word.starts_with(name) || after && word.ends_with(name))
    })
}

/// Blanks files that `#[cfg(test)] mod name;` somewhere declares as tests.
pub fn blank_test_modules(files: &mut [File]) {
    let mut tests: Vec<PathBuf> = Vec::new();
    for file in files.iter() {
        let Some(source) = &file.source else { continue };
        let folder = module_folder(&file.path);
        tests.extend(source.test_modules.iter().map(|name| folder.join(name)));
    }
    for file in files {
        let module = file.path.with_extension("");
        if let Some(source) = &mut file.source
            && (tests.iter().any(|t| module.starts_with(t)) || in_tests_folder(&file.path))
        {
            source.shipped = blanked(&source.shipped);
        }
    }
}

/// Where the files of the modules lie that the file `path` declares.
fn module_folder(path: &Path) -> PathBuf {
    let folder = path.parent().unwrap_or(Path::new(""));
    match path.file_stem().and_then(|s| s.to_str()) {
        Some(stem) if !["lib", "main", "mod"].contains(&stem) => folder.join(stem),
        _ => folder.to_owned(),
    }
}

fn in_tests_folder(path: &Path) -> bool {
    path.components().any(|c| c.as_os_str() == "tests" || c.as_os_str() == "benches")
}

fn blanked(text: &str) -> String {
    text.bytes().map(|b| if b == b'\n' { '\n' } else { ' ' }).collect()
}

/// Blanks comments and the insides of strings and characters.
fn blank_text(text: &str) -> String {
    let bytes = text.as_bytes();
    let mut out = bytes.to_vec();
    let mut at = 0;
    while at < bytes.len() {
        let rest = &text[at..];
        // (length of the whole, what stays at its start and end)
        let (length, kept) = if rest.starts_with("//") {
            (rest.find('\n').unwrap_or(rest.len()), 0)
        } else if rest.starts_with("/*") {
            (block_comment(bytes, at), 0)
        } else if let Some(length) = raw_string(text, at) {
            (length, 1)
        } else if bytes[at] == b'"' {
            (quoted(&bytes[at..]), 1)
        } else if bytes[at] == b'\'' {
            (character(rest), 1)
        } else {
            at += rest.chars().next().map_or(1, char::len_utf8);
            continue;
        };
        for byte in &mut out[at + kept..(at + length).saturating_sub(kept).max(at + kept)] {
            if *byte != b'\n' {
                *byte = b' ';
            }
        }
        at += length;
    }
    // Blanks replace whole characters, so this is still UTF-8.
    String::from_utf8(out).unwrap_or_default()
}

/// The length of a block comment, which may hold others.
fn block_comment(bytes: &[u8], start: usize) -> usize {
    let (mut depth, mut at) = (0, start);
    while at < bytes.len() {
        if bytes[at..].starts_with(b"/*") {
            depth += 1;
            at += 2;
        } else if bytes[at..].starts_with(b"*/") {
            depth -= 1;
            at += 2;
            if depth == 0 {
                break;
            }
        } else {
            at += 1;
        }
    }
    at.min(bytes.len()) - start
}

/// The length of a raw string that starts at `at` (`r"…"`, `r#"…"#`, with b or c before).
fn raw_string(text: &str, at: usize) -> Option<usize> {
    let name = |c: char| c.is_alphanumeric() || c == '_';
    let rest = &text[at..];
    let letters = ["r", "br", "cr"]
        .into_iter()
        .find(|p| rest.strip_prefix(p).is_some_and(|r| r.starts_with('"') || r.starts_with("#")))?;
    if text[..at].chars().next_back().is_some_and(name) {
        return None;
    }
    let after = &rest[letters.len()..];
    let hashes = after.bytes().take_while(|b| *b == b'#').count();
    let body = after[hashes..].strip_prefix('"')?;
    let end = format!("\"{}", "#".repeat(hashes));
    let length = body.find(&end).map_or(body.len(), |found| found + end.len());
    Some(letters.len() + hashes + 1 + length)
}

/// The length of a string in quotes.
fn quoted(bytes: &[u8]) -> usize {
    let mut at = 1;
    while at < bytes.len() {
        match bytes[at] {
            b'\\' => at += 2,
            b'"' => return at + 1,
            _ => at += 1,
        }
    }
    bytes.len()
}

/// The length of a character, or 1 for the quote of a lifetime or label.
fn character(rest: &str) -> usize {
    let mut chars = rest.char_indices().skip(1);
    match chars.next() {
        Some((_, '\\')) => rest[3..].find('\'').map_or(1, |end| end + 4),
        Some(_) => match chars.next() {
            Some((at, '\'')) => at + 1,
            _ => 1,
        },
        None => 1,
    }
}

/// Blanks what is built only for tests or the model checker; gives the names of such modules too.
fn blank_tests(code: &str) -> (String, Vec<String>) {
    let mut out = code.as_bytes().to_vec();
    let mut modules = Vec::new();
    let starts = code.match_indices("#[").chain(code.match_indices("#![")).map(|(at, _)| at);
    for start in starts {
        let Some(length) = bracketed(&code[start..]) else { continue };
        let attribute = &code[start..start + length];
        if !only_in_tests(attribute) {
            continue;
        }
        let end = if attribute.starts_with("#!") {
            code.len()
        } else {
            start + length + item(&code[start + length..])
        };
        let item = code[start + length..end].trim();
        if let Some(name) = item.strip_suffix(';').and_then(|i| i.rsplit_once("mod ")) {
            modules.push(name.1.trim().to_owned());
        }
        for byte in &mut out[start..end] {
            if *byte != b'\n' {
                *byte = b' ';
            }
        }
    }
    (String::from_utf8(out).unwrap_or_default(), modules)
}

/// Whether an attribute is `#[test]` or a `cfg` that needs `test` or `loom`.
fn only_in_tests(attribute: &str) -> bool {
    let inner = attribute.trim_start_matches(['#', '!', '[']).trim();
    let needs = |word| words(inner, word).next().is_some();
    let conditional = inner.starts_with("cfg(") && !inner.contains("not(");
    inner.starts_with("test]") || conditional && (needs("test") || needs("loom"))
}

/// The length up to the bracket that closes the first one.
fn bracketed(code: &str) -> Option<usize> {
    let mut depth = 0;
    for (at, byte) in code.bytes().enumerate() {
        match byte {
            b'[' => depth += 1,
            b']' if depth == 1 => return Some(at + 1),
            b']' => depth -= 1,
            _ => {}
        }
    }
    None
}

/// The length of the item that starts here: to its closing brace or its semicolon.
fn item(code: &str) -> usize {
    let (mut braces, mut others) = (0, 0);
    for (at, byte) in code.bytes().enumerate() {
        match byte {
            b'{' => braces += 1,
            b'}' if braces <= 1 => return at + usize::from(braces == 1),
            b'}' => braces -= 1,
            b'(' | b'[' => others += 1,
            b')' | b']' => others -= 1,
            b';' if braces == 0 && others == 0 => return at + 1,
            _ => {}
        }
    }
    code.len()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn comments_and_strings_are_blanked() {
        let text =
            "a(\"x // y\", 'z', '\\'', b'\\\\'); // panic!\n/* b /* c */ d */ e(r#\"f\"g\"#)";
        let code = blank_text(text);
        assert_eq!(code.len(), text.len());
        let dense: String = code.split_whitespace().collect();
        assert_eq!(dense, "a(\"\",'','',b'');e(r\"#)".replace("r\"", "r"));
    }

    #[test]
    fn lifetimes_are_no_characters() {
        let code = blank_text("fn f<'a>(x: &'a str) -> &'static str { g::<'a>(\"it's\") }");
        assert!(code.contains("fn f<'a>(x: &'a str)"), "{code}");
        assert!(!code.contains("it"), "{code}");
    }

    #[test]
    fn tests_are_not_shipped() {
        let source = Source::new(
            "fn a() { b.unwrap() }\n#[cfg(test)]\nmod tests {\n fn c() { d.unwrap() }\n}\n\
             #[cfg(loom)]\nfn e() { f.unwrap() }\n#[cfg(not(loom))]\nfn g() { h.unwrap() }\n\
             #[test]\nfn i() { j.unwrap() }",
        );
        let shipped: Vec<&str> = source.shipped.split_whitespace().collect();
        assert!(shipped.contains(&"b.unwrap()") && shipped.contains(&"h.unwrap()"));
        assert_eq!(source.shipped.matches("unwrap").count(), 2);
        assert_eq!(source.code.matches("unwrap").count(), 5);
    }

    #[test]
    fn whole_files_are_left_out() {
        assert!(Source::new("#![cfg(loom)]\nfn a() {}").shipped.trim().is_empty());
        let file = |path: &str, text: &str| File {
            path: path.into(),
            text: text.into(),
            source: Some(Source::new(text)),
        };
        let mut files = [
            file("c/src/lib.rs", "#[cfg(test)]\nmod checks;\nmod other;"),
            file("c/src/checks.rs", "fn a() {}"),
            file("c/src/checks/deep.rs", "fn a() {}"),
            file("c/src/other.rs", "fn a() {}"),
            file("c/tests/all.rs", "fn a() {}"),
        ];
        blank_test_modules(&mut files);
        let shipped = files.iter().map(|f| !f.source.as_ref().unwrap().shipped.trim().is_empty());
        assert_eq!(shipped.collect::<Vec<_>>(), [true, false, false, true, false]);
    }

    #[test]
    fn words_stand_alone() {
        assert_eq!(words("print!(); eprint!()", "print!").count(), 1);
        assert_eq!(words("ep_kernels::a my_ep_kernels ep_kernels2", "ep_kernels").count(), 1);
        assert_eq!(line_of("a\nb\nc", 4), 3);
    }
}
