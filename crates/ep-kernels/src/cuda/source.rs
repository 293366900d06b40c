//! The kernels' sources, and the layouts their structs must have.

use std::fmt::Write as _;

/// A CUDA source of this crate.
#[derive(Debug)]
pub struct KernelSource {
    /// File name, as compiler messages give it.
    pub name: &'static str,
    /// Names of its kernels.
    pub kernels: &'static [&'static str],
    /// Text that several sources share, put before `text`, and the layouts it checks.
    pub(crate) shared: &'static [(&'static str, &'static str, &'static [Layout])],
    pub(crate) text: &'static str,
    pub(crate) layouts: &'static [Layout],
}

/// Size and field offsets of a struct shared with a kernel, bytes.
#[derive(Debug)]
pub struct Layout {
    pub(crate) name: &'static str,
    pub(crate) size: usize,
    pub(crate) fields: &'static [(&'static str, usize)],
}

/// The [`Layout`] of a `repr(C)` struct under the same name. Name every field that is no array (the
/// kernel's check cannot take those), so that it covers every byte.
macro_rules! layout {
    ($name:ident { $($field:ident),* $(,)? }) => {
        $crate::cuda::source::Layout {
            name: stringify!($name),
            size: size_of::<$name>(),
            fields: &[$((stringify!($field), std::mem::offset_of!($name, $field))),*],
        }
    };
}
pub(crate) use layout;

/// Put before every source, by file name.
const COMMON: [(&str, &str); 2] = [
    ("prelude.cuh", include_str!("../../kernels/prelude.cuh")),
    ("ptx.cuh", include_str!("../../kernels/ptx.cuh")),
];

impl KernelSource {
    /// The text that is compiled: the prelude, the instructions of `ptx.cuh`, the host's layouts as
    /// macros, the source. Error messages count lines of the source.
    pub fn assemble(&self) -> String {
        let mut text = String::new();
        for (name, part) in COMMON {
            // Writing to a String cannot fail.
            let _ = writeln!(text, "#line 1 \"{name}\"\n{part}");
        }
        let own = (self.name, self.text, self.layouts);
        for &(name, part, layouts) in self.shared.iter().chain([&own]) {
            let _ = writeln!(text, "#line 1 \"layouts\"");
            for Layout { name, size, fields } in layouts {
                let _ = writeln!(text, "#define EP_SIZE_{name} {size}");
                for (field, at) in *fields {
                    let _ = writeln!(text, "#define EP_AT_{name}_{field} {at}");
                }
            }
            let _ = writeln!(text, "#line 1 \"{name}\"");
            text.push_str(part);
        }
        text
    }

    /// Every source of this crate.
    pub fn all() -> &'static [&'static KernelSource] {
        use super::moe;
        static ALL: [&KernelSource; 12] = [
            &super::probe::SM_PROBE,
            &super::holder::HOLDER,
            &moe::ROWS,
            &moe::SUMS,
            &moe::LAYOUT,
            &moe::PLACES,
            &moe::PLAN,
            &moe::NODES,
            &moe::FORWARD,
            &moe::FIXED,
            &moe::CAST,
            &super::gemm::GEMM,
        ];
        &ALL
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sources_include_nothing_and_check_every_field() {
        for source in KernelSource::all() {
            let text = source.assemble();
            assert!(!text.contains("#include"), "{} includes a header", source.name);
            let shared = source.shared.iter().flat_map(|(_, _, layouts)| layouts.iter());
            for layout in source.layouts.iter().chain(shared) {
                let check = format!("EP_CHECK_SIZE({});", layout.name);
                assert!(text.contains(&check), "{} lacks {check}", source.name);
                for (field, at) in layout.fields {
                    let check = format!("EP_CHECK_FIELD({}, {field});", layout.name);
                    assert!(text.contains(&check), "{} lacks {check}", source.name);
                    assert!(
                        text.contains(&format!("#define EP_AT_{}_{field} {at}\n", layout.name))
                    );
                }
            }
            for kernel in source.kernels {
                // Some names are made by macros.
                let family = kernel.trim_end_matches(|c: char| c.is_ascii_digit() || c == 'x');
                let spelled = format!("{kernel}(const __grid_constant__ ");
                let made = format!("{family}##");
                assert!(source.text.contains(&spelled) || source.text.contains(&made), "{kernel}");
            }
        }
    }

    /// Who runs kernels elsewhere than on a GPU replaces `ptx.cuh`; only the matrix multiplication,
    /// whose instructions are of one architecture, has its own.
    #[test]
    fn instructions_are_spelled_in_one_place() {
        for source in KernelSource::all().iter().filter(|source| source.name != "gemm.cu") {
            let parts = source.shared.iter().map(|&(name, text, _)| (name, text));
            for (name, text) in parts.chain([(source.name, source.text), COMMON[0]]) {
                assert!(!text.contains("asm"), "{name} speaks PTX; that belongs into ptx.cuh");
            }
        }
        assert!(COMMON[1].1.contains("asm volatile"));
    }

    #[test]
    fn names_are_unique() {
        let mut names: Vec<_> = KernelSource::all().iter().flat_map(|s| s.kernels).collect();
        let all = names.len();
        names.sort();
        names.dedup();
        assert_eq!(names.len(), all);
    }
}
