from roman import roman

assert [roman(n) for n in (1, 4, 9, 40, 1994, 3999)] == ["I", "IV", "IX", "XL", "MCMXCIV", "MMMCMXCIX"]
