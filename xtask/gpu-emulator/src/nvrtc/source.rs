//! From the text of a CUDA source to C++: what macros and headers cannot say in C++ is rewritten.

/// A `__global__` function of a source.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Global {
    pub name: String,
    /// The first argument of its launch bounds.
    pub max_threads: Option<String>,
}

/// The text without the section of `ptx.cuh`, whose functions the emulator has in C++.
pub(super) fn without_ptx(text: &str) -> String {
    const OPENING: &str = "#line 1 \"ptx.cuh\"\n";
    let Some(from) = text.find(OPENING) else { return text.into() };
    let behind = &text[from + OPENING.len()..];
    let to = behind.find("\n#line 1 \"").map_or("", |at| &behind[at + 1..]);
    format!("{}{to}", &text[..from])
}

/// Where the preprocessed text says that byte `at` comes from, as `file(line)`.
pub(super) fn origin(text: &str, at: usize) -> String {
    let (mut file, mut line) = ("source", 0u32);
    for row in text[..at].split('\n') {
        match marker(row) {
            // The next line's.
            Some((number, name)) => (line, file) = (number, name),
            None => line += 1,
        }
    }
    let line = line.saturating_sub(1);
    format!("{file}({line})")
}

/// A line `# 12 "name" 1`.
fn marker(row: &str) -> Option<(u32, &str)> {
    let (number, rest) = row.strip_prefix("# ")?.split_once(' ')?;
    Some((number.parse().ok()?, rest.strip_prefix('"')?.split('"').next()?))
}

/// Positions of a word that is no part of a longer one.
pub(super) fn words<'a>(text: &'a str, word: &'a str) -> impl Iterator<Item = usize> + 'a {
    let inside = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_';
    text.match_indices(word).map(|(at, _)| at).filter(move |&at| {
        let before = at.checked_sub(1).map(|i| text.as_bytes()[i]);
        let after = text.as_bytes().get(at + word.len()).copied();
        !before.is_some_and(inside) && !after.is_some_and(inside)
    })
}

/// The kernels of a preprocessed text.
pub(super) fn globals(text: &str) -> Vec<Global> {
    words(text, "__global__").filter_map(|at| global(&text[at + "__global__".len()..])).collect()
}

/// Reads on behind `__global__`, as far as the name in front of the parameters.
fn global(rest: &str) -> Option<Global> {
    let head = &rest[..rest.find(['{', ';'])?];
    let mut max_threads = None;
    let mut tail = head;
    if let Some(at) = words(head, "__launch_bounds__").next() {
        let open = at + head[at..].find('(')?;
        let close = closing(head, open)?;
        max_threads = head[open + 1..close].split(',').next().map(|text| text.trim().to_string());
        tail = &head[close + 1..];
    }
    let before = tail[..tail.find('(')?].trim_end();
    let start = before.rfind(|c: char| !c.is_alphanumeric() && c != '_').map_or(0, |at| at + 1);
    let name = before[start..].to_string();
    (!name.is_empty()).then_some(Global { name, max_threads })
}

/// The place of the parenthesis that closes the one at `open`.
fn closing(text: &str, open: usize) -> Option<usize> {
    let mut depth = 0;
    for (at, byte) in text.bytes().enumerate().skip(open) {
        match byte {
            b'(' => depth += 1,
            b')' => depth -= 1,
            _ => {}
        }
        if depth == 0 {
            return Some(at);
        }
    }
    None
}

/// Shared declarations and constant parameters in C++.
pub(super) fn rewrite(text: &str) -> String {
    constant_parameters(&shared_declarations(text))
}

/// `const __grid_constant__ T p` becomes `const T &p`: all threads read the launch's one copy.
fn constant_parameters(text: &str) -> String {
    const WORD: &str = "__grid_constant__";
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = words(rest, WORD).next() {
        out.push_str(&rest[..at]);
        rest = rest[at + WORD.len()..].trim_start();
        let end = rest.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(rest.len());
        out.push_str(&rest[..end]);
        out.push_str(" &");
        rest = &rest[end..];
    }
    out + rest
}

fn shared_declarations(text: &str) -> String {
    const WORD: &str = "__shared__";
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = words(rest, WORD).next() {
        let before = rest[..at].trim_end();
        let end = rest[at..].find(';').map_or(rest.len(), |end| at + end);
        let declaration = &rest[at + WORD.len()..end];
        match before.strip_suffix("extern") {
            Some(before) => {
                out.push_str(before);
                out.push_str(&dynamic(declaration));
            }
            None => {
                out.push_str(&rest[..at]);
                out.push_str(&fixed(declaration));
            }
        }
        rest = &rest[end..];
    }
    out + rest
}

/// `T name[]` behind the block's static shared memory.
fn dynamic(declaration: &str) -> String {
    let (kind, name, _) = parts(declaration);
    format!("{kind} *{name} = ({kind} *)ep_dynamic_place()")
}

/// `T name dims` at its place in every block's copy of the section.
fn fixed(declaration: &str) -> String {
    let (kind, name, dims) = parts(declaration);
    format!(
        "typedef {kind} ep_type_{name} {dims}; \
         static EpPlace<ep_type_{name}> ep_place_{name} __attribute__((section(\"ep_shared\"))); \
         ep_type_{name} &{name} = *(ep_type_{name} *)ep_static_place(&ep_place_{name})"
    )
}

/// Type, name and dimensions of a declaration, its alignment dropped: places in dynamic shared
/// memory are aligned to 128 bytes, static ones as their type.
fn parts(declaration: &str) -> (String, String, String) {
    let mut text = declaration.to_string();
    loop {
        let Some(at) = words(&text, "__align__").next() else { break };
        let close = text[at..].find(')').map_or(text.len(), |close| at + close + 1);
        text.replace_range(at..close, "");
    }
    let (plain, dims) = match text.find('[') {
        Some(at) => (text[..at].trim().to_string(), text[at..].to_string()),
        None => (text.trim().to_string(), String::new()),
    };
    let start = plain.rfind(|c: char| !c.is_alphanumeric() && c != '_').map_or(0, |at| at + 1);
    (plain[..start].trim().into(), plain[start..].into(), dims)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_section_of_ptx_is_dropped_and_nothing_else() {
        let text =
            "#line 1 \"a.cuh\"\na\n#line 1 \"ptx.cuh\"\nasm\n#line 1 \"layouts\"\n#define X 1\n";
        assert_eq!(without_ptx(text), "#line 1 \"a.cuh\"\na\n#line 1 \"layouts\"\n#define X 1\n");
        assert_eq!(without_ptx("no such section"), "no such section");
        assert_eq!(without_ptx("a\n#line 1 \"ptx.cuh\"\nasm\n"), "a\n");
    }

    #[test]
    fn kernels_are_found_with_their_bounds() {
        let text = "extern \"C\" __global__ void __launch_bounds__(512, 1)\n    one(const P &p) {}\n\
                    extern \"C\" __global__ void two(int *p, int n) { f(); }";
        let found = globals(text);
        assert_eq!(found[0], Global { name: "one".into(), max_threads: Some("512".into()) });
        assert_eq!(found[1], Global { name: "two".into(), max_threads: None });
        assert_eq!(found.len(), 2);
    }

    #[test]
    fn constant_parameters_are_references() {
        let text = "void f(const __grid_constant__ Params p) {}";
        assert_eq!(constant_parameters(text), "void f(const Params & p) {}");
    }

    #[test]
    fn shared_memory_is_found_by_the_block() {
        let text = "{ extern __shared__ __align__(128) unsigned char shared[]; f(shared); }";
        let expected =
            "{ unsigned char *shared = (unsigned char *)ep_dynamic_place(); f(shared); }";
        assert_eq!(shared_declarations(text), expected);
        let fixed = shared_declarations("{ __shared__ u32 sums[4][8]; }");
        assert!(fixed.contains("typedef u32 ep_type_sums [4][8];"), "{fixed}");
        assert!(fixed.contains("ep_type_sums &sums = *(ep_type_sums *)"), "{fixed}");
    }

    #[test]
    fn an_origin_counts_from_the_last_marker() {
        let text = "# 1 \"a\"\nx\n# 40 \"b.cu\"\nfirst\nsecond";
        assert_eq!(origin(text, text.len()), "b.cu(41)");
        assert_eq!(origin(text, text.find('x').unwrap()), "a(1)");
    }
}
